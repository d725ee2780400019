"""What a run says: metrics, samples, alarms, trackers, the report."""
