"""How a call is cut: into blocks of query rows, tiles of keys and chunks of heads, with the numbers that each reads."""
