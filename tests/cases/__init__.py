"""Every op once, for all that checks them: how its arguments are drawn, what it means, how far a result may be off."""
