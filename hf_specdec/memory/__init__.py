"""Memory of rows that grows with their texts: pages behind fixed addresses."""
