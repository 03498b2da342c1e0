"""What a run leaves and shows: its folder, its files, its terminal.

run_folder, earlier       the folder of a run, and what an earlier run left in it
result_files              the files that stock transformers and peft open
model_card, usage, limits what a result says of itself, and how other tools use it

sample, prompts, rate     let a model answer: from a prompt to a text, and how fast
answers, characters       texts as a terminal may be shown them

terminal                  lines; progress of steps, counting of all else
"""
