"""The report of an evaluation: tables, plots, pages."""
