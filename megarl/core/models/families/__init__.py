"""One file a family: each has ARCHITECTURES, the names config.json calls it by and what reads it. Found by being here."""
