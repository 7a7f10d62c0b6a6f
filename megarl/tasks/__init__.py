"""What core/base/contracts.py asks for: data/ prompts and traces, graders/ rewards, environments/ tools and games."""
