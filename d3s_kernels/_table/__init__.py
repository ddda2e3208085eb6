"""What is known of every op: how its arguments are drawn, what it means, and how near a back-end has to come."""
