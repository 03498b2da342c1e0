"""What is done with a result: opening it, merging, chatting, evaluating.

request, options          what a command line says; subject: what RUN in it names
opened                    a subject on its devices

chat                      a conversation with a model, and what answers in it
  chat_wish               what `roundpipe chat` was asked for
  conversation            held at a terminal
  answering, piped        prompts that are given or piped in place of it

evaluating                a result's loss and the share of its answers that are right
  eval_wish               what `roundpipe eval` was asked for
  scored_data, questions  what it is scored on
  score_text              the scores for people and programs

merge                     an adapter and its base as one model
  merge_wish              what `roundpipe merge` was asked for
  merged_weights          the weights, one after another
  precision               in which dtype they are computed and saved
  merge_checks, comparing whether the result is the model that was there before
"""
