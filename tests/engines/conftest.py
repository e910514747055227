from support.leftovers import no_process_is_left

__all__ = ["no_process_is_left"]
