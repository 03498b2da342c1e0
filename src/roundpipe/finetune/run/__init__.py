"""A run from config to result.

loop                      the order in which it happens
prepare                   all that is needed before the first step: content, room
steps                     the steps, from a model on its devices to a result
  training                one step: batches, schedule, own_loss; retry where memory is short
  events                  who is told of steps, and what follows them: due, best, evaluate
  saving                  checkpoints
  signals                 what may end it
step_log, recorder        what is recorded of steps (busy), and what ran when
  loggers, log_backends   the services that it goes to
result                    what is left in the end
"""
