"""Which samples, in which order, and how they become batches on the device."""
