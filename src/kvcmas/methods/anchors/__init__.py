"""Parts of the methods that predict a deviation from those of other texts.

contents    what shared texts have been seen, recognised without markup
pool        anchors: texts with the deviations that their readers had
states      how a deviation is held: in full, as low-rank factors, or sparse
weights     the gate, and how much each anchor counts
distances   how far a text is from the anchors
prediction  deviations, weighted and added to moved KV
known       what is kept of one tenant, and of one request until it ends
method      what `kvcomm` and `kvcmas-anchors` have in common
"""
