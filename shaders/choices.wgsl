// The choices of received rows, segment by segment.

// The local expert of a choice, or one past the last for a choice that lives elsewhere or in a row past the count.
fn local_expert(choice: u32) -> u32 {
    let p = given.scalars;
    let row = choice / p.k;
    let expert = ids_at(choice) - p.first_expert;
    let lives = row % p.capacity < counts_at(row / p.capacity) && expert < p.experts;
    return select(p.experts, expert, lives);
}
