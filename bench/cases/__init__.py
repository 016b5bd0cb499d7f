"""One benchmark per module, each with ``run(quick) -> Result``."""
