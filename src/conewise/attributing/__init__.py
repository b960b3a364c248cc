"""Attribution by gradients: what every patch of a sweep would do, to first order, and how wrong that is."""
