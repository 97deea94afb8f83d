"""Vector terms on lines in a `HankelPlan`, on the query, key or value side."""
