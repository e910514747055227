"""Experimental: payloads and sums by NCCL; the interface is `transport_choice`."""
