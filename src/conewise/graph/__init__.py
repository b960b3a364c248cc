"""What is computed: sites, rules, cones, grafts."""
