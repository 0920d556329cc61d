"""`zeepo compare`: one training program plainly, under DDP, and under zeepo in several ways."""
