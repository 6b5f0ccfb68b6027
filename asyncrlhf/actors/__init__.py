"""Thin Ray actors around the parts, and the messages between them and the controller. A worker holds the work and
knows no Ray; its actor only carries calls to it.
"""

DOORS = (
    "annotator", "build_generator", "episodes", "generator", "learner", "messages", "model_annotators", "part", "where",
    "worker",
)  # fmt: skip
