"""`doctor --prove`: a run made small by rule, and compared with one that shards nothing."""
