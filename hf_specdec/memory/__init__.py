"""Memory of rows that follows their texts: pages of a GPU behind fixed addresses."""
