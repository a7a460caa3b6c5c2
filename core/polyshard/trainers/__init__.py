"""What the packages for trainers have in common: ``polyshard.transformers``, ``polyshard.accelerate`` and
``polyshard.lightning``. Nothing here imports a trainer, and each adds what to do about an error in its own words.
"""
