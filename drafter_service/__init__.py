"""The server that guesses. It owns a proposer and its cache, decides nothing, and may vanish at any time."""
