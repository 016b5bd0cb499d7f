"""The reader of training batches: a fixed order, workers that rebuild, a client that merges and resumes."""
