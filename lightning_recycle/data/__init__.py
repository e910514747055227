"""Batches by address, which any worker reads, and streams that can be rewound."""
