"""What is known of all runs of one shape: where dimensions lie, what values cost, which rows mix."""
