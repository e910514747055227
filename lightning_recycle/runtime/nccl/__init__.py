"""Experimental: payloads and sums from device to device, by NCCL; its interface is `transport_choice`."""
