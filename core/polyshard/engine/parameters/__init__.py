"""What stands under a parameter's name: originals, views, stand-ins, one parameter for an optimizer."""
