"""What vectors on lines do in a `HankelPlan`, whichever side they meet."""
