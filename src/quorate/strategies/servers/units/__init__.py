"""The modes `bounded` and `asynchronous` of parameter servers: units of work, each applied by itself.

A **unit** is a lane of a step. The **hub**, the first server, deals units to workers that are free. A worker pulls the
newest values, computes the lane's gradient and pushes it; the servers apply it at once, each to the blocks that it
holds. From one **boundary** to the next nobody waits for anybody else, except as the clock demands; at a boundary all
units up to a step are applied on every block, and nothing else is: there the state is evaluated and saved.
"""
