"""The job store: lifecycle, tables, files."""
