"""Figures and one page of them from the rows that are kept in results/, timelines from the raw data beside theirs, and
from nothing else (`make figures`).

kept_rows   the rows with their place and configuration
palette     the colour of every series, here and in the pictures of run folders
chart       what a figure is: a selection of rows, a table of them, a drawing; how lines and intervals are drawn
decode, launches, plans, operations, prefill, served, load, distances    the figures, by subject
page        results/figures/*.svg and results/report.html, and whether they are of the rows that are kept
"""
