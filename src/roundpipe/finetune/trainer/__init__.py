"""A Trainer for scripts written for Hugging Face.

trainer, familiar         what users call: training, evaluation, results; and all the rest
refusals                  what transformers' Trainer has and this one has not
stand_ins, showing        what scripts and callbacks look at in place of accelerate, torch, us

arguments                 ``args``, in whose words ever, to settings: `told`
  sft_arguments           of TrainingArguments and SFTConfig
  argument_fields         what becomes of each of their fields
  adapter_values, model_init_kwargs    of objects among them
  made_arguments          the other way: arguments for callbacks where none were given

setting_up                model, data and devices, out of these:
  loading, optimizers, router_loss     what is done to a model, and to an optimizer over it
  datasets                samples of rows -> sft_rows -> write_samples, or row_samples that go
                          to the user's collator as they are (collating)

callbacks                 which event follows which (epochs); callback_handler tells them
  follow_up               the records, evaluations and checkpoints that they ask for
  standing                what of this a checkpoint keeps
evaluating                the loss on held-out samples
folder                    what an earlier run left, and what is written
"""
