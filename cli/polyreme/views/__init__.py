"""What commands print: tables, live progress, numbers in words."""
