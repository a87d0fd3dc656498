"""Plug-ins for layers and inputs of a few models; engines know only the interface of plug-ins."""
