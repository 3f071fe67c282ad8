"""Why a run does not learn: signals of a run as plain series, one small function per cause, findings in plain words."""
