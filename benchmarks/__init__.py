"""Speed measurements. Nothing here is a test: times belong to the machine that ran them."""
