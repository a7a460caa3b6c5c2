"""From a plan to shards: values that were not there yet, and what a failure leaves."""
