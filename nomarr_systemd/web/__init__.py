"""The page, its event stream, the API and the metrics: a process that reads and changes nothing."""
