"""What `retrofit` and `replace_position` share: modules with a swapped class, and the libraries that they come from."""
