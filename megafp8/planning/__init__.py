"""What a run will take and gain: step time, layouts, goodput and the dry run, from the configuration alone."""
