"""What every platform promises, as tests that a vendor runs: `pytest --pyargs trimaran.device_workers.contract_suite
--platform NAME`. Needs pytest (an extra). Judges behaviour, not signatures.
"""
