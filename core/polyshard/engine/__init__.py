"""The sharding engine: flat units, their step and what they share. Private; the public face is ``polyshard``."""
