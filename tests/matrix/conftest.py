from tests.distributed.shared_ranks import shared_ranks as shared_ranks
