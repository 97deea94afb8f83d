"""What `relpos.retrofit` needs to know of other libraries' models: one kind of position per file."""
