"""The engines that generate with drafters: the static one, and transformers' own loop."""
