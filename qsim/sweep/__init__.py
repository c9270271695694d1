"""Grids of cells: study files, journals, worker processes. Knows no events and no bits."""
