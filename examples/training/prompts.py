"""First words of prompts, and the filter that keeps held-out prompts out of the training data."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable

TOPICS = """
the ocean|a small bakery|climate change|the Roman Empire|photosynthesis|black holes|the immune system|healthy eating
a job interview|time management|the French Revolution|machine learning|personal finance|a lost dog|an old lighthouse
electric cars|the water cycle|a dragon|friendship|supply and demand|inflation|the human heart|volcanoes|a robot
a road trip|a wedding|renewable energy|DNA|the moon landing|a detective|music theory|yoga|a birthday party|chess
gardening|a startup|customer service|remote work|social media|data privacy|the stock market|a haunted house|jazz
Shakespeare|the Renaissance|World War II|democracy|vaccines|gravity|quantum mechanics|evolution|plate tectonics
the solar system|antibiotics|sleep|stress|exercise|a marathon|cooking pasta|coffee|bread|camping|photography|painting
poetry|a time traveler|a pirate|a teacher|a nurse|a farmer|a scientist|a wizard|a city at night|autumn|winter|the rain
a train station|an airport|a museum|a library|a small town|a garden|a river|mountains|the desert|a forest|a storm
public speaking|negotiation|leadership|teamwork|a resume|a budget|a mortgage|taxes|insurance|retirement
a small business|marketing|e-commerce|a mobile app|a website|databases|encryption|the internet|a compiler|recursion
sorting|operating systems|neural networks|probability|linear algebra|calculus|geometry|prime numbers|statistics
fractions|percentages|an experiment|chemistry|acids and bases|the periodic table|atoms|electricity|magnetism
sound waves|light|energy|thermodynamics|engines|bridges|airplanes|space travel|satellites|bees|whales|birds|dinosaurs
insects|cats|dogs|horses|rainforests|coral reefs|philosophy|ethics|free will|Buddhism|ancient Egypt|the Silk Road
the Industrial Revolution|the Cold War|human rights|immigration|education|online learning|homework|parenting
a new baby|a move to a new city|a language|Spanish|Japan|India|Brazil|Paris|New York|Africa|the Olympics|soccer
basketball|a movie|a novel|a song|a video game|fashion|architecture|cheese|a bicycle repair|houseplants|a neighbor
a broken dishwasher|public transport|a landlord|a school play|tea|knitting|a flea market|lost luggage|a parking ticket
the night shift|a fire alarm|a choir|a beehive|old maps|a family recipe|glaciers|tides|the Moon|earthquakes|fossils
honey|salt|glass|paper|rubber|silk|steel|concrete|batteries|magnets|microscopes|telescopes|clocks|calendars|maps
bridges in winter|street food|sushi|soup|vegetarian cooking|leftovers|a picnic|a power cut|a snowstorm|a drought
a flood|recycling|plastic|solar panels|wind turbines|nuclear power|hydrogen|trains|ships|submarines|drones|traffic
bicycles|running shoes|back pain|headaches|allergies|vitamins|diabetes|blood pressure|a first-aid kit|glasses|teeth
memory|dreams|habits|procrastination|motivation|loneliness|anger|gratitude|small talk|gossip|a breakup|forgiveness
a board game|card tricks|origami|watercolors|ceramics|opera|the violin|a drum kit|ballet|theater|documentary films
science fiction|fairy tales|myths|haiku|limericks|proverbs|riddles|handwriting|spelling|grammar|Latin|Arabic|French
sign language|translation|journalism|advertising|a podcast|newsletters|spreadsheets|passwords|phishing|backups
open source|smartphones|robots in hospitals|3D printing|voice assistants|search engines|weather forecasts|elections
juries|copyright|a contract|a will|refunds|interest rates|credit cards|rent|auctions|stocks and bonds|coins|trade
the Vikings|the Aztecs|the Ottoman Empire|Cleopatra|Napoleon|Marie Curie|Isaac Newton|Leonardo da Vinci|Mozart
the printing press|the Titanic|the Great Wall|castles|pyramids|the Suez Canal|Antarctica|the Amazon|Canada|Mexico
Egypt|Kenya|Italy|Germany|Korea|Vietnam|Australia|Iceland|London|Istanbul|Venice|islands|deserts at night|lakes
wolves|owls|octopuses|spiders|ants|butterflies|sharks|elephants|penguins|tortoises|mushrooms|trees|grass|tomatoes
"""
PEOPLE = """
my sister|my father|my grandmother|my neighbor|my boss|my best friend|our teacher|a colleague|my landlord|a customer
my roommate|a six-year-old|a teenager|a retired engineer|a nurse|a shop owner|a new employee|a student|my team|a tourist
a shy person|an old friend|the mayor|a chef|a plumber|my doctor|a librarian|a bus driver|my aunt|a musician|a coach
"""
PLACES = """
LONDON|PARIS|BERLIN|TOKYO|NAIROBI|CHICAGO|SYDNEY|LIMA|DELHI|CAIRO|TORONTO|MADRID|OSLO|SEOUL|DENVER|DUBLIN|ATHENS|LAGOS
BOSTON|GENEVA|MEXICO CITY|HELSINKI|SEATTLE|WARSAW|VIENNA|MANILA|ROME|LISBON|ATLANTA|PHOENIX|ZURICH|BRUSSELS
"""
TASKS = """
write a python function|a linked list|a binary search|a SQL query|a regular expression|a CSV file|a JSON object
a REST API|a web scraper|a class for a bank account|a JavaScript function|an HTML page|a CSS layout|a bash script
a C++ program|a Java method|a unit test|a loop|a dictionary|a list of numbers|a string|a matrix|a stack and a queue
a tree|a graph|a calculator|a to-do list|a game of tic-tac-toe|Fibonacci numbers|prime numbers|palindromes|dates
an off-by-one bug|a memory leak|error handling|a decorator|a generator|a hash table|merge sort|quicksort|recursion
file names|duplicates|word counts|a password|random numbers|vowels|anagrams|temperatures|a shopping cart|log files
"""
GENERAL = """
Explain {}|Explain {} to a child|What is {}?|Why is {} important?|Tell me about {}|Write a short story about {}
Write a poem about {}|Write an essay about {}|Write an email about {}|Write a blog post about {}
Write a speech about {}|Write a dialogue about {}|Write a letter to a friend about {}|Summarize {}
Summarize the following text about {}:|What are the main causes of {}|What are the benefits of {}
What are the pros and cons of {}|Give me five tips for {}|Give me ideas for {}|List ten facts about {}
Make a list of {}|Create a plan for {}|Describe {}|Describe how {}|How do I start with {}|How does {}
How can I learn about {}|Compare {} and|What is the difference between {} and|Imagine you are {}|Pretend to be {}
You are an expert in {}.|Act as a teacher of {}|Help me understand {}|I want to|I am planning
I have a question about {}|Can you help me with {}|Could you recommend|Translate into|Rewrite this sentence about {}:
Correct the grammar of this paragraph about {}:|Classify|Extract the names from this text
Read the following paragraph about {} and answer|Is it true that {}|Who was|When did|Where can I|Which is better,
What would happen if {}|Discuss {}|Analyze|Argue for and against {}|Give an example of {}|Define {}|Outline {}
Write a product description for {}|Write a title for|Write a review of {}|Write a joke about {}|Write a song about {}
Write three sentences about {}|Continue the story about {}:|Give me a recipe for|Plan a day with {}
Brainstorm names for {}|Why do|Why does|What makes|What should I|How many|How much|How long|Do you|Should I
Let's talk about {}|Solve this problem about {}:|If a train|A farmer has|A shop sells|Sarah has|Calculate|Solve for x:
Find the|What is the next number|All of the|Suppose that|Think step by step:|A rectangle|The sum of|There are
Two friends
"""
SITUATIONS = """
I run|I work as|I am a beginner at|I have been trying to learn about {topic} but|{person} asked me|{person} and I
I have to give a talk on {topic}|Our club|We are a team of|I just bought|I just moved|I want to surprise {person} with
I need a message to {person} about {topic}|Draft a note to {person}|Compose|Convince {person} that|Imagine that {person}
Here is a paragraph about {topic}:|Here is a list:|Here is a table of|The following is an email from {person}:
Improve this text about {topic}:|Turn this into|Shorten this:|Which of these|In two sentences,|In exactly|Without using
Using simple words, explain {topic} to {person}|Step by step,|Give {person} advice about {topic}|As a table,|In JSON,
Rank|Put these in order:|Sort the following|Categorize|Extract|Name three|Tell me the story of|Invent|Design|Suggest
Play the role of {person}|You are {person}.|You are a helpful assistant for {topic}.|Interview {person} about {topic}
{topic}: what|{topic} or|Is {topic}|Are|Can|Could {person}|Did|Has|If|Let x|Given that|My budget is|My goal is|Today
Yesterday|Every morning|After|Before|Because of {topic},|How would {person}|How should {person}|How do people|How old
What happens when|What did|What do you think of {topic}|What is a good|What is the best way|What are some|What if
Who invented|Who discovered|Where does|Where is|When is|When should|Why can't|Why would {person}|Which country
"""
ARTICLE_TASKS = """
Summarize the following article:|Summarize this text.|Read the text and answer the question.|Proofread this article:
What are the key points of this report?|Write a summary of the news below.|Here is the document:|Consider this passage:
"""
ARTICLES = """
{place} \u2014 Officials said on {day} that|{place} \u2014 A study of {topic}|{place} ({day}) - The government
{place}, {day} \u2014 Police|{place} \u2014 The company announced|{place} \u2014 Residents of|{place} \u2014 Researchers
{place}: {topic}|A new report on {topic} says|Experts warn that {topic}|On {day}, {person}|For years, {topic}
The match on {day}|The court ruled on {day}|The price of|More than|Two people|Thousands of people|A fire|Scientists have
The minister|The festival|The city council|Voters|A spokesperson for|According to a survey about {topic},|Prosecutors
{topic} is|{topic} was|The history of {topic} begins|The term|In the early 20th century,|In {year},|Born in {year},
The {year} census|Chapter 1|Once upon a time|It was {day}, and {person}|The door|When the train|She had never|He looked
Dear|Hello everyone,|Minutes of the meeting of {day}|Abstract:|Introduction|Interviewer:|Review:|From:|Subject: {topic}
I visited|I bought|My first|We stayed|The patient|Terms of service|Step 1:|Ingredients:|Press release|FAQ about {topic}
Editor's note:|Letter to the editor about {topic}:|Opinion: {topic}|Guide to {topic}|Lecture notes: {topic}|Day 1:
"""
CODING = """
Write a Python function that|Write a Python program for {}|Write code for {}|Write a function for {}|Implement {}
Implement {} in Python|Implement {} in JavaScript|Implement {} in Java|Implement {} in C++|How do I use {} in Python?
How do I|Explain this code about {}:|What does this code do?|Fix the bug in this code with {}:|Debug
Refactor this code|Write a SQL query to|Write a regular expression that|Write a bash script that
Write a unit test for {}|Write a class that|Create a function that takes|Create a script for {}|Given a list of
Given a string|Complete the function|def|What is the time complexity of {}|Optimize|Convert this
Show me how to work with {} in|Write an HTML page with {}|Write a JavaScript function that|Write a C program that
Write a program that|Explain {} in programming|Design a class for {}
"""
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FREE_SHARE, CODING_SHARE, SITUATION_SHARE = 0.25, 0.22, 0.2


def entries(text: str) -> list[str]:
    """The parts of `text` between `|` and line ends."""
    return [entry for line in text.strip().splitlines() for entry in line.split("|")]


_GENERAL, _CODING, _TOPICS, _TASKS = map(entries, (GENERAL, CODING, TOPICS, TASKS))
_SITUATIONS, _PEOPLE, _ARTICLES, _PLACES = map(entries, (SITUATIONS, PEOPLE, ARTICLES, PLACES))
_ARTICLE_TASKS = entries(ARTICLE_TASKS)


def random_opening(rng: random.Random) -> str:
    """The first words of a prompt, which the target completes; sometimes none."""
    kind = rng.random()
    if kind < FREE_SHARE:
        return ""
    if kind < FREE_SHARE + CODING_SHARE:
        return rng.choice(_CODING).format(rng.choice(_TASKS))
    if kind < FREE_SHARE + CODING_SHARE + SITUATION_SHARE:
        return _filled(rng.choice(_SITUATIONS), rng)
    return rng.choice(_GENERAL).format(rng.choice(_TOPICS))


def random_article_opening(rng: random.Random) -> tuple[str, str]:
    """A question about an article, and the article's first words, which the target continues."""
    return rng.choice(_ARTICLE_TASKS), _filled(rng.choice(_ARTICLES), rng)


def _filled(template: str, rng: random.Random) -> str:
    """`template` with random words in its places, and a capital first letter."""
    words = {"topic": rng.choice(_TOPICS), "person": rng.choice(_PEOPLE), "place": rng.choice(_PLACES)}
    text = template.format(**words, day=rng.choice(DAYS), year=rng.randint(1750, 2024))
    return text[:1].upper() + text[1:]


def normalized_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def word_grams(words: list[str], order: int = 4) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + order]) for start in range(len(words) - order + 1)}


class PromptFilter:
    """Refuses prompts that repeat, and prompts that are equal or similar to held-out ones; `refused` counts both.

    Similar: at least half of the prompt's word 4-grams, without case and punctuation, occur in one held-out prompt, or
    half of a held-out prompt's 4-grams occur in it.
    """

    def __init__(self, held_out: Iterable[str]):
        self._equal, self._sizes = set(), []
        self._places: dict[tuple[str, ...], list[int]] = {}
        self._seen: set[str] = set()
        self.refused = Counter(held_out_overlap=0, repeated=0)
        for index, text in enumerate(held_out):
            words = normalized_words(text)
            grams = word_grams(words)
            self._equal.add(" ".join(words))
            self._sizes.append(len(grams))
            for gram in grams:
                self._places.setdefault(gram, []).append(index)

    def is_held_out(self, text: str) -> bool:
        words = normalized_words(text)
        grams = word_grams(words)
        shared = Counter(index for gram in grams for index in self._places.get(gram, ()))
        return " ".join(words) in self._equal or any(
            count >= 0.5 * min(len(grams), self._sizes[index]) for index, count in shared.items()
        )

    def accepts(self, text: str) -> bool:
        """Whether to train on a prompt: it has two words at least, is new, and not held out."""
        words = normalized_words(text)
        if len(words) < 2:
            return False
        if " ".join(words) in self._seen:
            self.refused["repeated"] += 1
            return False
        self._seen.add(" ".join(words))
        if self.is_held_out(text):
            self.refused["held_out_overlap"] += 1
            return False
        return True
