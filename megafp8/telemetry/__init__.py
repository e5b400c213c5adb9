"""What a run says about itself: records, where they are written, and how time is measured."""
