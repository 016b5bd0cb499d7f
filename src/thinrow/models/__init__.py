"""Models as plain torch modules: an HSTU ranker and a pooled-history DLRM."""
