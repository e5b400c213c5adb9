"""Analysis of runs from their records alone: comparisons, scaling laws, plots and pages. No torch."""
