"""The layouts that come with polyshard."""
