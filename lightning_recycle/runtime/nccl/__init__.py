"""Experimental: payloads and sums by NCCL; the interface is `nccl_transport`."""
