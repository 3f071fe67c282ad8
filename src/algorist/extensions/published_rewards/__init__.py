"""Rewards of other systems, as they were published: CS336's, open-r1's, DAPO's, the GSM8K gist's, OneShotGRPO's."""
